"""The server as HTTP alone: guards, errors, streams, the OpenAPI document. Knows no protocol of a model API."""
