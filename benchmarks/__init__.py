"""Measurements of tellin and of the engines it is compared with.

``python -m benchmarks --help`` lists the commands. The package imports nothing heavy, so that the
drivers in `benchmarks.drivers` also run under another environment's Python.
"""
