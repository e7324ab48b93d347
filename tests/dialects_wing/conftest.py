"""The gateway of the server's tests."""

from tests.server.conftest import gateway as gateway
