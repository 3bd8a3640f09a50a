"""Structured output: what is asked for becomes a grammar, the grammar a mask of tokens per step.

    front end:  StructuredOutputsParams --checker--> helper process: translate + compile once --> grammar text, or a 400
    worker:     grammar text --bank--> compiled grammar (cached) --> one Matcher per request --> masks for the sampler

Grammars are llguidance's (https://github.com/guidance-ai/llguidance). Importing this package imports nothing of it:
it is loaded with the first constrained request. Knows nothing of HTTP, schedulers or logits.
"""
