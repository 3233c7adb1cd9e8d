"""Whole jobs: the launcher or an attached loop, with agents, supervisors and daemons.

For what only a job has: supervisors that replace workers, torchrun, run folders, the
order of start and end, and the equality of a whole run with one without faults. A job
of four small ranks takes seconds, and its processes share the machine's processors with
other tests. A new test here says in its docstring why nothing cheaper fails for the
same reason.

Cheaper: `tests.harness.threads` for recoveries, `tests.harness.gloo` for groups and
stores, and `walking_job` for processes that only look like a job.

Entry points:
    training: `train` runs the launcher's training on forked ranks, without supervisors.
    references: `uninterrupted`, the same training without faults, once in a session.
    elastic_job: `ElasticJob`, a supervised job that a test strikes at exact points.
    campaign: `survive`, an `ElasticJob` that lives through a list of faults.
    chaos: `Chaos`, random faults for an `ElasticJob`.
    agents_job: `AgentsJob`, several agents of the real torchrun on this machine.
    hosts_job: `HostsJob`, a job on hosts that are network namespaces; needs root.
    attached_jobs: `run_jobs`, jobs of Megatron-LM, Megatron-Bridge and ms-swift.
    walking_job: `running_job`, supervised processes that train nothing.
    stand_in_torchrun: `StandIn`, for commands that start torchrun.

Example:
    with ElasticJob(4, tmp_path, *PP2) as job:
        job.order(2, Phase.BACKWARD, iteration=5)
        result = job.wait()
    assert outcome_of(job.run, result) == uninterrupted(4, *PP2)
"""
