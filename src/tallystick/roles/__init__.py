"""Trainer, auditor, judge and verifier; each module is one party's whole job."""
