"""A server with OpenAI's interface in front of the real engine: completions, chat, health, Prometheus metrics.

`start` builds the engine and listens, `app` has the routes, `protocol` the requests, `answers` the responses.
"""
