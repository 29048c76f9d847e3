"""Fuzzing of everything that decodes bytes of strangers or peers: see docs/security/fuzzing.md."""
