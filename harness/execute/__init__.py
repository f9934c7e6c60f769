"""Execution: planned points become committed records, one at a time or in worker processes."""
