"""An OpenAI-compatible server in front of the real engine: completions, chat, health, Prometheus metrics."""
