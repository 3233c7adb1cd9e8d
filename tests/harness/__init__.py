"""Three ways to run ranks in a test, the cheapest first.

    harness      ranks are                  one run takes      for
    threads/     threads of this process    under a second     the engine: recoveries,
                                                               servers, disks
    gloo/        forked processes on gloo   about a second     groups, stores, processes
    jobs/        jobs of the launcher       3 s to minutes     supervisors, torchrun,
                                                               exactness of whole runs

The docstring of each package says when its ranks are needed, names the entry points,
and has an example. A test of a pure function needs none of the three.
"""
