"""Commands on evidence: show, verify, prove, bundle, policy, keys, logs."""
