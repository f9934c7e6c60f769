"""The figures, one a module: each takes the study and gives a drawing with its data, or the reason for its absence."""
