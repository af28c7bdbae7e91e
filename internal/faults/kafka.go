package faults

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"

	"github.com/twmb/franz-go/pkg/kmsg"
)

// KafkaProxy is a gate in front of each broker of a cluster. Brokers tell their
// clients where to connect; it reads these answers and puts itself in the place
// of the brokers, so it stands in front of any cluster, however that is set up.
type KafkaProxy struct {
	gates map[string]*Gate // by the broker's address

	mutex sync.Mutex
	names map[string]string // what clients are told for a broker's address
	cut   map[kmsg.Key]int
	done  int

	swallow *swallowed // nil for nothing
}

// StartKafkaProxy starts a proxy in front of brokers, given as host:port with
// commas between them. It has to be told of all of them.
func StartKafkaProxy(ctx context.Context, brokers string) (*KafkaProxy, error) {
	p := &KafkaProxy{gates: make(map[string]*Gate), names: make(map[string]string), cut: make(map[kmsg.Key]int)}
	for broker := range strings.SplitSeq(brokers, ",") {
		gate, err := openGate(ctx, broker, p.carry)
		if err != nil {
			p.Close()
			return nil, err
		}
		p.gates[broker] = gate
		p.names[broker] = gate.Addr()
	}
	return p, nil
}

// Brokers is what clients connect to.
func (p *KafkaProxy) Brokers() string {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	var all []string
	for _, name := range p.names {
		all = append(all, name)
	}
	return strings.Join(all, ",")
}

// Gates are the gates, one for each broker.
func (p *KafkaProxy) Gates() []*Gate {
	var all []*Gate
	for _, gate := range p.gates {
		all = append(all, gate)
	}
	return all
}

// Name has clients told another address for a gate of this proxy, where
// something else stands in front of it.
func (p *KafkaProxy) Name(gate *Gate, addr string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.names[gate.upstream] = addr
}

// Shut shuts all gates, Silence silences them, Open opens them, and Break breaks
// their connections; see Gate.
func (p *KafkaProxy) Shut() { p.each((*Gate).Shut) }

// Silence is Gate.Silence for all brokers.
func (p *KafkaProxy) Silence() { p.each((*Gate).Silence) }

// Open is Gate.Open for all brokers.
func (p *KafkaProxy) Open() { p.each((*Gate).Open) }

// Break is Gate.Break for all brokers.
func (p *KafkaProxy) Break() (count int) {
	p.each(func(g *Gate) { count += g.Break() })
	return count
}

// Passed is Gate.Passed of all brokers together.
func (p *KafkaProxy) Passed() (times int) {
	p.each(func(g *Gate) { times += g.Passed() })
	return times
}

// Close ends the proxy.
func (p *KafkaProxy) Close() { p.each((*Gate).Close) }

func (p *KafkaProxy) each(do func(*Gate)) {
	for _, gate := range p.gates {
		do(gate)
	}
}

// CutAnswers passes the next so many requests of a kind on, waits until the
// broker has answered, and breaks the connection in place of the answer. With
// kmsg.Produce: written, and the producer does not hear of it.
func (p *KafkaProxy) CutAnswers(kind kmsg.Key, times int) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.cut[kind] = times
}

// Cut says how many answers were cut off.
func (p *KafkaProxy) Cut() int {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.done
}

func (p *KafkaProxy) strike(kind kmsg.Key) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.cut[kind] == 0 {
		return false
	}
	p.cut[kind]--
	p.done++
	return true
}

// asked is a request that has no answer yet.
type asked struct{ key, version int16 }

func (p *KafkaProxy) carry(l *link) {
	var mutex sync.Mutex
	open := make(map[uint32]asked) // by the id that the answer will have
	l.both(func() error {
		client := bufio.NewReaderSize(l.client, 32<<10)
		for {
			frame, err := readFrame(client)
			if err != nil {
				return err
			}
			if len(frame) < 12 {
				return errors.New("a request without a head")
			}
			lost, err := p.swallows(frame)
			if err != nil {
				return err
			}
			if lost {
				continue
			}
			mutex.Lock()
			open[binary.BigEndian.Uint32(frame[8:])] = asked{
				key: int16(binary.BigEndian.Uint16(frame[4:])), version: int16(binary.BigEndian.Uint16(frame[6:])),
			}
			mutex.Unlock()
			if err := l.write(l.server, frame); err != nil {
				return err
			}
		}
	}, func() error {
		server := bufio.NewReaderSize(l.server, 32<<10)
		for {
			frame, err := readFrame(server)
			if err != nil {
				return err
			}
			if len(frame) < 8 {
				return errors.New("an answer without a head")
			}
			mutex.Lock()
			request, known := open[binary.BigEndian.Uint32(frame[4:])]
			delete(open, binary.BigEndian.Uint32(frame[4:]))
			mutex.Unlock()
			if known && p.strike(kmsg.Key(request.key)) {
				l.cut()
				return errEnded
			}
			if known {
				if frame, err = p.rename(request, frame); err != nil {
					return err
				}
			}
			if err := l.write(l.client, frame); err != nil {
				return err
			}
		}
	})
}

// rename puts the names of the gates into an answer that says where brokers are.
func (p *KafkaProxy) rename(request asked, frame []byte) ([]byte, error) {
	switch kmsg.Key(request.key) {
	case kmsg.Metadata, kmsg.FindCoordinator, kmsg.DescribeCluster:
	default:
		return frame, nil
	}
	response := kmsg.ResponseForKey(request.key)
	response.SetVersion(request.version)
	head := 8
	if response.IsFlexible() {
		if len(frame) < 9 || frame[8] != 0 {
			return nil, errors.New("an answer with tags in its head")
		}
		head++
	}
	if err := response.ReadFrom(frame[head:]); err != nil {
		return nil, fmt.Errorf("read an answer of kind %d, version %d: %w", request.key, request.version, err)
	}
	switch answer := response.(type) {
	case *kmsg.MetadataResponse:
		for i := range answer.Brokers {
			p.renameTo(&answer.Brokers[i].Host, &answer.Brokers[i].Port)
		}
	case *kmsg.FindCoordinatorResponse:
		p.renameTo(&answer.Host, &answer.Port)
		for i := range answer.Coordinators {
			p.renameTo(&answer.Coordinators[i].Host, &answer.Coordinators[i].Port)
		}
	case *kmsg.DescribeClusterResponse:
		for i := range answer.Brokers {
			p.renameTo(&answer.Brokers[i].Host, &answer.Brokers[i].Port)
		}
	}
	renamed := response.AppendTo(frame[:head:head])
	binary.BigEndian.PutUint32(renamed, uint32(len(renamed)-4))
	return renamed, nil
}

func (p *KafkaProxy) renameTo(host *string, port *int32) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	name, known := p.names[net.JoinHostPort(*host, strconv.Itoa(int(*port)))]
	if !known {
		return
	}
	toHost, toPort, err := net.SplitHostPort(name)
	number, fault := strconv.ParseInt(toPort, 10, 32)
	if errors.Join(err, fault) == nil {
		*host, *port = toHost, int32(number)
	}
}

// readFrame reads one request or answer with its length.
func readFrame(from *bufio.Reader) ([]byte, error) {
	var size [4]byte
	if _, err := io.ReadFull(from, size[:]); err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(size[:])
	if length > maxMessage {
		return nil, fmt.Errorf("a frame of %d bytes", length)
	}
	frame := make([]byte, 4+length)
	copy(frame, size[:])
	_, err := io.ReadFull(from, frame[4:])
	return frame, err
}
