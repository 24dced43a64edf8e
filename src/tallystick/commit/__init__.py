"""Canonical bytes, domain-separated digests, Merkle trees and state commitments; pure."""
