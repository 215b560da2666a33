"""Backends: what runs a plan. Only this package imports the extension module `_C`.

`native.NativeBackend` runs on this machine's CPU, `reference.ReferenceBackend` is the NumPy oracle;
both take a `batch.StepBatch`. Nothing is imported here: the extension loads when a backend is made.
"""
