"""Ranks that are forked processes, which communicate over gloo.

For process groups, stores, memberships, signals, files and Megatron's own layers: what
needs processes, and no supervisor. The processes are forked from one server that has
imported torch and Megatron (`tests.preload`), so that a rank starts in milliseconds. A
rank that raises, dies or hangs fails the test with the tracebacks of all ranks.

Cheaper: `tests.harness.threads`, where the engine is the subject. For supervisors that
replace dead workers, use `tests.harness.jobs`.

Entry points:
    ranks: `run_ranks` calls a function on all ranks; `rank_store` is their store.
    processes: `Child`, a process that exchanges messages with the test; `Watch`.
    workers: `open_groups` and `open_membership`, the elastic side of a worker.
    collectives: `COLLECTIVES`, all calls of Megatron on a process group.
    backends: `HeldBackend`, a backend that a test holds back.

Example:
    def _sum() -> float:
        dist.init_process_group(
            "gloo", store=rank_store(), rank=own_rank(), world_size=2
        )
        dist.all_reduce(total := torch.tensor(1.0))
        return float(total)

    assert run_ranks(2, _sum) == [2.0, 2.0]
"""
