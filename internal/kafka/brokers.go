package kafka

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/confluentinc/confluent-kafka-go/v2/kafka"
)

// MinimumVersion is the oldest Kafka that can do what is asked of it.
const MinimumVersion = "2.5"

// requirements are the requests by which a broker of MinimumVersion is known,
// each with the version that came with it.
var requirements = []struct {
	key, version int16
	name         string
}{
	{28, 3, "TxnOffsetCommit"}, // offsets in a transaction, fenced by the group's generation (KIP-447)
	{9, 7, "OffsetFetch"},      // no offset of a transaction that is still open (KIP-447)
}

// dialTimeout is for one address.
const dialTimeout = 3 * time.Second

// checkVersions asks the first broker that can be reached for the versions it
// speaks. The client library asks the same and keeps it to itself: of an old
// broker it says much later, and of one feature at a time, that it is missing.
//
// A broker that does not answer is not judged here.
func checkVersions(ctx context.Context, brokers string) error {
	for address := range strings.SplitSeq(brokers, ",") {
		address = strings.TrimSpace(address)
		spoken, err := apiVersions(ctx, address)
		if err != nil {
			continue
		}
		for _, required := range requirements {
			if spoken[required.key] < required.version {
				return fmt.Errorf("the Kafka at %s is too old: it speaks %s up to version %d and %d is needed, "+
					"which came with Kafka %s: upgrade the brokers to that or newer", address, required.name, spoken[required.key],
					required.version, MinimumVersion)
			}
		}
		return nil
	}
	return nil
}

// apiVersions sends the one request that every broker since 0.10 understands
// (ApiVersions, version 0) and returns the highest version of each kind of
// request that the broker speaks.
func apiVersions(ctx context.Context, address string) (map[int16]int16, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	deadline, _ := ctx.Deadline()
	if err := conn.SetDeadline(deadline); err != nil {
		return nil, err
	}

	const client = "onceledger-admin"
	request := binary.BigEndian.AppendUint32(nil, uint32(2+2+4+2+len(client)))
	request = binary.BigEndian.AppendUint16(request, 18) // ApiVersions
	request = binary.BigEndian.AppendUint16(request, 0)
	request = binary.BigEndian.AppendUint32(request, 1) // what the answer refers to
	request = binary.BigEndian.AppendUint16(request, uint16(len(client)))
	request = append(request, client...)
	if _, err := conn.Write(request); err != nil {
		return nil, err
	}

	var head struct {
		Size, Correlation int32
		Error             int16
		Count             int32
	}
	if err := binary.Read(conn, binary.BigEndian, &head); err != nil {
		return nil, err
	}
	if head.Error != 0 || head.Correlation != 1 || head.Count < 0 || head.Count > 1000 {
		return nil, errors.New("not an answer of a Kafka broker")
	}
	spoken := make(map[int16]int16)
	body := io.LimitReader(conn, int64(head.Count)*6)
	for range head.Count {
		var api struct{ Key, Lowest, Highest int16 }
		if err := binary.Read(body, binary.BigEndian, &api); err != nil {
			return nil, err
		}
		spoken[api.Key] = api.Highest
	}
	return spoken, nil
}

// checkAdvertised goes to each address that the brokers tell their clients to
// use. A wrong one shows nowhere else: the first broker answers, and then
// everything that is sent to it waits.
func checkAdvertised(ctx context.Context, admin *kafka.AdminClient, brokers string) error {
	metadata, err := askMetadata(ctx, admin)
	if err != nil {
		return fmt.Errorf("ask for the brokers' addresses: %w", err)
	}
	for _, broker := range metadata.Brokers {
		address := net.JoinHostPort(broker.Host, strconv.Itoa(broker.Port))
		dial, cancel := context.WithTimeout(ctx, dialTimeout)
		conn, err := new(net.Dialer).DialContext(dial, "tcp", address)
		cancel()
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("Kafka answers at %s, but broker %d tells its clients to come to %s, and nobody answers there (%w): "+
				"set advertised.listeners on that broker to an address that can be reached from here", brokers, broker.ID, address, err)
		}
		if err == nil {
			_ = conn.Close()
		}
	}
	return nil
}

// askMetadata asks for ten seconds at most, in turns so short that the end of ctx
// is noticed: the call does not know of it.
func askMetadata(ctx context.Context, admin *kafka.AdminClient) (metadata *kafka.Metadata, err error) {
	const turn = 500 * time.Millisecond
	for range 20 {
		metadata, err = admin.GetMetadata(nil, false, int(turn/time.Millisecond))
		if err == nil || ctx.Err() != nil {
			break
		}
	}
	return metadata, errors.Join(err, ctx.Err())
}
