"""Reports on runs: `python -m launcher.report RUN [RUN...] -o report.html`.

The command reads run folders and does not change the runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launcher.report.as_json import to_json
from launcher.report.facts import Facts, gather
from launcher.report.markdown import to_markdown
from launcher.report.page import to_html
from launcher.report.read import read_runs
from launcher.report.timeline import to_trace
from moe_ckpt.arguments import Parser
from moe_ckpt.elastic.live_workers import LATEST
from moe_ckpt.errors import ConfigError, exit_status

_FORMATS: Mapping[str, Callable[[Sequence[Facts]], str]] = {
    "html": to_html,
    "md": to_markdown,
    "json": to_json,
    "trace": to_trace,
}
_EXAMPLES = (
    "examples:\n"
    "  python -m launcher.report                              "
    "the newest run, to report.html in its folder\n"
    "  python -m launcher.report A B C -o report.html         "
    "three runs side by side\n"
    "  python -m launcher.report FOLDER                       "
    "all runs in a folder, as launcher.compare leaves them\n"
    "  python -m launcher.report A --format md                "
    "tables on the terminal\n"
    "  python -m launcher.report A --format trace -o t.json   "
    "a timeline for https://ui.perfetto.dev"
)


def main(arguments: Sequence[str]) -> int:
    """Write the report that the arguments ask for.

    Args:
        arguments: The words of the command line.

    Returns:
        The exit status.
    """

    def report() -> None:
        options = _parser().parse_args(arguments)
        chosen = options.format or _format_of(options.output)
        text = _FORMATS[chosen]([gather(run) for run in read_runs(options.run)])
        _write(text, _output_path(options.output, chosen, options.run[0]))

    return exit_status(report)


def _format_of(output: Path | None) -> str:
    suffix = output.suffix.removeprefix(".") if output else "html"
    return suffix if suffix in _FORMATS else "html"


def _output_path(output: Path | None, chosen: str, run: Path) -> Path | None:
    """Return the file of the report; None: the terminal."""
    if output is None and chosen in ("html", "trace"):
        return run / ("report.html" if chosen == "html" else "trace.json")
    return output


def _write(report: str, path: Path | None) -> None:
    if path is None:
        print(report, end="")
        return
    try:
        path.write_text(report)
    except OSError as error:
        raise ConfigError(
            f"-o: got {str(path)!r}, wanted a file that can be written ({error})"
        ) from error
    print(f"wrote {path}, {len(report.encode()) / 1e6:.1f} MB")


def _parser() -> Parser:
    parser = Parser(
        prog="python -m launcher.report",
        description=(
            "Report on runs: what was trained, what failed, where the time went."
        ),
        epilog=_EXAMPLES,
    )
    add = parser.add_argument
    add(
        "run",
        nargs="*",
        type=Path,
        default=[LATEST],
        help="folders of runs, or of several (default: the newest run)",
    )
    add(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where to (default: RUN/report.html; md and json: the terminal)",
    )
    add(
        "--format",
        choices=_FORMATS,
        help=(
            "default: by the output's suffix, else html; trace: Chrome's, for Perfetto"
        ),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
