"""Reports on runs: `python -m launcher.report RUN [RUN...] -o report.html`.

The package reads run folders and writes reports; no module changes a run. Facts flow
one way. Only the first and the last step do input and output:

    read (files -> columns) -> account (where time went) -> episodes, facts
        -> plots, tables -> page, markdown, ...
"""
