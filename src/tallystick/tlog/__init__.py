"""A transparency log's tree, policy and entries (C2SP); pure."""
