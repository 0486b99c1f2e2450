"""Pipelines: stages, schedules, their simulator and executors. Not there yet; see docs/design.md, section 5."""
