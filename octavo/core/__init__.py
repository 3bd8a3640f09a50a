"""The brain: decides what each step computes and which request holds which KV block.

Knows numbers and messages only: no tensors, no tokenizer, no sockets, and nothing of the worker.
"""
