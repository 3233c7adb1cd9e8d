"""Jobs whose ranks are threads of the test's process, around the real engine.

For rules of the engine: what ranks agree on, which state a recovery reaches, what is in
memory, on peers, on servers and on disks at which moment. Session, in-memory tier,
recovery, durable tier, replica daemons and status pages are those of production. The
model (`model.Model`) and the links between ranks are the harness's own. No process dies
and no time limit of gloo passes, so deaths strike at exact points, and a job takes a
fraction of a second. Every run is compared with the same job without faults, bit for
bit.

Cheaper: for a decision alone, call the decider, for example `recovery.plan`. For
collectives, process groups and signals, use `tests.harness.gloo`.

Entry points:
    job: `ThreadJob`, `Fault`, and `exact`, which runs a job and compares its end.
    model: `Shape`, and the shapes `PAIR` and `PIPE`.
    stops: `At`, which acts between two iterations, and `started_again`.
    history: `History` and `Follower`, which follow states through recoveries.
    ranks: `run_threads`, which calls one function on ranks without a job.

Example:
    fault = Fault(rank=1, phase=Phase.BACKWARD, iteration=5)
    job = ThreadJob(tmp_path, config("moevement", window=2), PAIR, faults=[fault])
    assert exact(job).events(Rejoined)[0].iteration == 4
"""
