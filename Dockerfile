# Two images: Kafka Connect with the Debezium connector (--target connect), and, the
# last stage, all three programs: `api` (the default), `worker` and `onceledger`.

# What Maven fetches is compared with what is pinned, and must be all of it.
FROM maven:3.9.9-eclipse-temurin-17 AS jars
WORKDIR /java
COPY deploy/java ./
RUN set -eu; \
    for part in connect debezium; do \
      mvn --batch-mode --quiet --strict-checksums --file "$part/pom.xml" \
        dependency:copy-dependencies "-DoutputDirectory=/jars/$part"; \
      awk '{ print $1 "  " $3 }' "$part/jars.txt" > /tmp/sums; \
      (cd "/jars/$part" && sha256sum --check --strict --quiet /tmp/sums); \
      test "$(ls "/jars/$part" | wc -l)" -eq "$(wc -l < /tmp/sums)"; \
    done

FROM eclipse-temurin:17.0.15_6-jre AS connect
COPY --from=jars /jars/connect/ /opt/connect/lib/
COPY --from=jars /jars/debezium/ /opt/connect/plugins/debezium/
USER 65532:65532
EXPOSE 8083

# The Kafka client is C, so both stages are Debian of the same release.
FROM golang:1.26-bookworm AS build
WORKDIR /src
COPY go.mod go.sum ./
RUN go mod download
COPY . .
RUN CGO_ENABLED=1 go build -trimpath -buildvcs=false -ldflags "-s -w" -o /out/ ./cmd/api ./cmd/worker ./cmd/onceledger

FROM debian:bookworm-slim
# /keys is where docker-compose.yml keeps the first API key: a new volume gets this owner.
RUN install -d -o 65532 -g 65532 -m 0700 /keys
COPY --from=build /out/ /usr/local/bin/
USER 65532:65532
EXPOSE 8080 8081
CMD ["api"]
