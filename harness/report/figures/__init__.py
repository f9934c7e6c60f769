"""The figures, one in each module. Each takes the study and gives a drawing with its data, or the reason for none."""
