# make quickstart   train a LangGraph agent on this machine, about five minutes after installation
# make test         the quick tests, in three processes (ARGS="-n 0" for one, ARGS=--all for all tests)
# make check        lint, types and the quick tests: the gate for every change
# make weight       files, lines and tokens of each room and wing, with their budgets
# make mcp-servers  the MCP servers of others that run on Node, for the tests that need them (npm)
# make page-tools   axe-core, which checks the dashboard's pages in the tests (npm)
# make node-clients the clients that run on Node, and Node 22 itself, for the tests that need them (npm)
# make site         the documentation site, in website/built
# make python-clients clients in Python that pin too much for .venv, in environments of their own, for the tests that need them
# ARGS is passed to the command, PIP_ARGS to pip, for example:
#   make quickstart ARGS="--seed 1" PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"

.PHONY: quickstart test check weight site mcp-servers page-tools node-clients python-clients
export PIP_ARGS

quickstart:
	@scripts/bootstrap quickstart
	@.venv/bin/offbook quickstart $(ARGS)

test:
	@scripts/bootstrap test
	@.venv/bin/python -m compileall -q src integrations # hundreds of processes import them, also where Python may not write bytecode
	@.venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

check:
	@scripts/bootstrap test
	@scripts/check

weight:
	@python3 -m tests.test_weight

site:
	@python3 -m venv website/.venv
	@website/.venv/bin/python -m pip --disable-pip-version-check install --quiet $(PIP_ARGS) -r requirements/site.txt
	@website/.venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation $(PIP_ARGS) --editable .
	@website/build

mcp-servers:
	@npm install --prefix tests/mcp_adapter --ignore-scripts --no-package-lock --no-audit --no-fund --silent

page-tools:
	@npm install --prefix tests/dashboard --ignore-scripts --no-package-lock --no-audit --no-fund --silent

node-clients:
	@npm ci --prefix tests/client/node --ignore-scripts --no-audit --no-fund --silent

python-clients:
	@scripts/bootstrap test
	@cd tests/client/python && for name in agents crewai; do \
	    ../../../.venv/bin/uv venv -q --allow-existing -p ../../../.venv/bin/python .venv/$$name \
	    && ../../../.venv/bin/uv pip sync -q --compile-bytecode -p .venv/$$name/bin/python $$name.txt || exit 1; done
