"""Pool of KV blocks in shared memory, its transfer between nodes, and the rule that says when to move them.

Knows nothing of `node` and `gossip`. Nothing outside `kvmigrate.connector` imports vLLM or torch, and importing the
package itself imports none of its parts, so that an engine process pays only for what it uses.
"""
