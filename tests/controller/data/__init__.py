"""Tests of controller.data."""
