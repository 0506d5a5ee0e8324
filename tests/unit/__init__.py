"""Tests of single modules, without a job or with few ranks."""
