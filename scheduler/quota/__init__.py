"""Quotas: who may hold units of a resource, decided purely; the ledger that makes the decisions durable."""
