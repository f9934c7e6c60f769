"""A sweep: overrides become planned points, and planned points become committed records."""
