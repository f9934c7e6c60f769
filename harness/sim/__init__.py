"""The replay: one simpy model for both sides, the cost models that price its steps, and their fit. No torch here."""
