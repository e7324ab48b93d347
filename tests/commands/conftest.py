"""A server for the commands that read its records."""

from tests.server.conftest import gateway as gateway
