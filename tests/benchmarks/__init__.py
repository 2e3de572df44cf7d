"""Benchmarks: every figure a ratio against a bare loop or a peer measured in the same run.

``python -m tests.benchmarks`` from the root of the repository runs them. Nothing in here is part of the
daemon, and no test asserts a time.
"""
