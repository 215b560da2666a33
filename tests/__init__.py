"""Tests, one folder per layer; helpers are imported as ``tests.<area>.<module>``."""
