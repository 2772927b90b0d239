# The command `ckpt`, with what its commands need but a GPU: docker build -t ckpt . && docker run --rm -v "$PWD:/work" ckpt help
FROM python:3.12-slim AS build
WORKDIR /source
RUN apt-get update && apt-get install --yes --no-install-recommends git=1:2.* && rm -rf /var/lib/apt/lists/*
COPY . .
RUN python -m venv /opt/ckpt \
    && /opt/ckpt/bin/pip install --no-cache-dir --index-url https://download.pytorch.org/whl/cpu torch==2.13.0 \
    && /opt/ckpt/bin/pip install --no-cache-dir --constraint constraints.txt '.[all]'

FROM python:3.12-slim
RUN apt-get update && apt-get install --yes --no-install-recommends fuse3=3.* && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/ckpt /opt/ckpt
ENV PATH=/opt/ckpt/bin:$PATH
WORKDIR /work
ENTRYPOINT ["ckpt"]
CMD ["help"]
