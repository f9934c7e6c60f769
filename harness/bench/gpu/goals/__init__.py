"""The goals that a GPU is asked for, in one place, and the code that judges them by what a part left in its folder."""
