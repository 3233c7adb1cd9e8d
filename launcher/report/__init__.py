"""Reports on runs: `python -m launcher.report RUN [RUN...] -o report.html`.

Reads run folders and writes; never touches a run. Facts flow one way, pure but for the
first and the last:

    read (files -> columns) -> account (where time went) -> episodes, facts -> plots, tables -> page, markdown, ...
"""
