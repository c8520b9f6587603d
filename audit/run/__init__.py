"""Execution of a plan: scheduling of jobs, worker processes, resumption, provenance, output files."""
