"""Published claims and figures, beside what our own code computes: the claims ledger and the reproduced figures."""
