"""Predictions beside published measured figures of real GPUs: what the cost models are worth, by one command."""
