"""Tests of the measuring tools: what they report must be what the engines did."""
