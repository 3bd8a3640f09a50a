"""Prometheus metrics with vLLM's names, labels and buckets, so that its dashboards work unchanged."""
