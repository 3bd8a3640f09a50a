"""KV connectors: tiers behind the block pool. A planner in the scheduler's process decides, a mover in the worker's
copies; both name blocks by the hash of their contents."""
