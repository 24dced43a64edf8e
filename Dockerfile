# The command tally. Bare by default: what verifies, plans and inspects. EXTRAS='[all]' also records and audits.
#
#   docker build -t tallystick .
#   docker run --rm --network none -v "$PWD:/data:ro" tallystick verify weights --bundle evidence.bundle --policy policy.json
FROM python:3.11-slim-bookworm AS build
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
COPY . /src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels /src

FROM python:3.11-slim-bookworm
ARG EXTRAS=""
COPY --from=build /wheels /wheels
COPY constraints.txt /wheels/constraints.txt
RUN pip install --no-cache-dir -c /wheels/constraints.txt "$(echo /wheels/*.whl)${EXTRAS}" && rm -r /wheels \
    && useradd --create-home --uid 1000 tally
USER tally
WORKDIR /data
ENTRYPOINT ["tally"]
