"""Commands of the command line, one module each: ``add_arguments(parser)`` and ``run(args)``.

A module is loaded when its command is called. ``run`` returns the exit code; errors are raised and
become one line in `tellin.entrypoints.cli`. Results go to standard output, all else to standard
error.
"""
