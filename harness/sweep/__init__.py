"""A sweep. `plan` turns overrides into planned points; `execute` turns planned points into committed records."""
