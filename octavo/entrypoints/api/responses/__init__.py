"""The Responses API, stateless: every request brings its whole conversation."""
