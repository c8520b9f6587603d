"""Execution of a plan: scheduling of jobs, worker processes, resumption, provenance, files that are written."""
