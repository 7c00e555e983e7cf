# The router (and, as `extproc fake-pod`, the fake pod):
#
#   docker build -t extproc --build-arg VERSION=local --build-arg REVISION=$(git rev-parse HEAD) .
#
# To pin the base image exactly, add its digest, which a tag does not fix:
#   docker buildx imagetools inspect python:3.15.0-slim-trixie   # prints "Digest: sha256:..."
#   docker build --build-arg BASE=python:3.15.0-slim-trixie@sha256:... .

# The newest minor version that the tests run on, where a request costs least (docs/performance.md).
ARG BASE=python:3.15.0-slim-trixie

FROM ${BASE} AS build
ENV PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_CACHE_DIR=1
# Without pip: nothing needs it at run time.
RUN python -m venv --without-pip /venv
WORKDIR /src
# Without `kubernetes` it is 60 MB smaller: for a router that finds its pods by DNS or file.
ARG EXTRAS=kubernetes,otel,redis
# Rarely changed files first, so that a code change does not reinstall everything.
COPY constraints.txt pyproject.toml ./
RUN python -c 'import sys, tomllib; found = tomllib.load(open("pyproject.toml", "rb"))["project"]; \
        parts = [found["optional-dependencies"][extra] for extra in sys.argv[1].split(",") if extra]; \
        print(*sum(parts, found["dependencies"]), sep="\n")' "${EXTRAS}" > /tmp/requirements.txt \
 && pip --python /venv/bin/python install --constraint constraints.txt --requirement /tmp/requirements.txt
COPY README.md LICENSE ./
COPY envoy envoy
COPY loadtest/scenarios loadtest/scenarios
COPY loadtest/data loadtest/data
COPY loadtest/locustfile.py loadtest/
COPY extproc extproc
RUN pip --python /venv/bin/python install --constraint constraints.txt ".[${EXTRAS}]"

# locust with the load tests, for docker-compose.yml: docker build --target loadtest .
# Of its dependencies only locust has a fixed version.
FROM build AS loadtest
RUN pip --python /venv/bin/python install --constraint constraints.txt locust==2.47.0
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
USER 65532:65532
EXPOSE 8089

FROM ${BASE}
ARG VERSION=unknown
ARG REVISION=unknown
ARG CREATED=unknown
ARG SOURCE=unknown
LABEL org.opencontainers.image.title="lora-extproc" \
      org.opencontainers.image.description="Routes OpenAI-API requests to vLLM pods by LoRA adapter, as an Envoy external processor." \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.created="${CREATED}" \
      org.opencontainers.image.source="${SOURCE}"
COPY --from=build /venv /venv
# Nothing here has to become somebody else; `passwd`, `su` and their like are the base image's.
RUN find / -xdev -type f -perm /6000 -exec chmod a-s {} +
# The root file system may be read-only; the bytecode is already there. The interpreter's compiler is off
# (docs/performance.md).
ENV PATH=/venv/bin:$PATH PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PYTHON_JIT=0
# Numeric, so that Kubernetes can verify that it is not root.
USER 65532:65532
# gRPC, plain gRPC health, metrics; the last two if configured.
EXPOSE 9002 9003 9090
ENTRYPOINT ["extproc"]
CMD ["serve", "--config", "/etc/extproc/extproc.yaml"]
# The admin port's default address; Kubernetes uses probes instead. Python would cost 60 ms of CPU each time.
HEALTHCHECK --interval=10s --timeout=3s --start-period=30s \
    CMD ["bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/9090 && printf 'GET /healthz HTTP/1.1\\r\\nhost: localhost\\r\\nconnection: close\\r\\n\\r\\n' >&3 && grep -q '^HTTP/1.1 200' <&3"]
