# The bundled model behind OpenAI's interface:
#   docker build -t draftproof . && docker run --rm -p 8000:8000 draftproof
# Options of `draftproof serve` follow the image's name: docker run … draftproof --api-key "$KEY" --max-batch 32
FROM python:3.12-slim

# torch's CPU build: the default one brings gigabytes for GPUs.
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu

WORKDIR /app
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
RUN pip install --no-cache-dir --index-url "$TORCH_INDEX" torch==2.13.0 \
    && pip install --no-cache-dir -c constraints.txt ".[serve]"

RUN useradd --create-home draftproof
USER draftproof
RUN draftproof models fetch

EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=60s CMD python -c "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/health')"
# A list, not a shell's line: the signal reaches the server, which lets running requests end.
ENTRYPOINT ["draftproof", "serve", "--host", "0.0.0.0"]
