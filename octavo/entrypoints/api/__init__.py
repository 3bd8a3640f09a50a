"""The HTTP APIs, a file or a folder each: shapes, translation to the terms of ``chat``, routes, error bodies."""
