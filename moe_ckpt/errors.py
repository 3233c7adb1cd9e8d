"""Every error that moe_ckpt raises on purpose, each also a kind that the standard library knows."""


class MoeCkptError(Exception):
    """Root of all errors that a caller may want to catch; the message says what, got and wanted."""


class ConfigError(MoeCkptError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class DataError(MoeCkptError, ValueError):
    """Training data that is missing, empty or does not fit the model."""


class CheckpointSaveError(MoeCkptError, OSError):
    """A checkpoint could not be written; what was saved before is untouched."""


class CheckpointLoadError(MoeCkptError, RuntimeError):
    """A checkpoint is incomplete, damaged, or belongs to another run, model or layout."""


class NothingLeftError(CheckpointLoadError):
    """No host memory that is left leads to a state of the whole job."""


class RolledBackError(MoeCkptError, RuntimeError):
    """All ranks are at an earlier state now: whoever trains goes on after `iteration` steps."""

    def __init__(self, iteration: int) -> None:
        super().__init__(f"all ranks are at iteration {iteration} again")
        self.iteration = iteration


class PeersLostError(MoeCkptError, RuntimeError):
    """Other ranks died, or are about to be replaced: nothing that was communicated since can be trusted."""
