"""The figures by subject. Each takes the study and returns a drawing with its data, or why there is none."""
