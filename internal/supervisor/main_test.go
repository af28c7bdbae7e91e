package supervisor

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/onceledger/onceledger/internal/devstack"
)

// programVariable turns this test program into one of those that the
// supervisor runs: "api", "worker" or "broker".
const programVariable = "SUPERVISOR_TEST_PROGRAM"

func TestMain(m *testing.M) {
	var err error
	switch program := os.Getenv(programVariable); program {
	case "":
		os.Exit(m.Run())
	case "broker":
		err = runBroker(os.Args[1:])
	default:
		err = runProgram(program)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

// seen is what a stand-in for the API or the worker tells of itself.
type seen struct {
	Pid     int
	Environ map[string]string
}

// runProgram answers /readyz and /seen until SIGTERM. Then it notes that it was
// told to stop, and whether what it needs was still there.
func runProgram(name string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	addr := os.Getenv("ONCELEDGER_ADDR")
	if name == "worker" {
		addr = os.Getenv("WORKER_ADDR")
	}
	listener, err := net.Listen("tcp", addr)
	if err != nil {
		return err
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/readyz", func(w http.ResponseWriter, _ *http.Request) {
		if os.Getenv("TEST_NEVER_READY") == name {
			w.WriteHeader(http.StatusServiceUnavailable)
			_, _ = w.Write([]byte(`{"reason":"the stars are wrong"}`))
		}
	})
	mux.HandleFunc("/seen", func(w http.ResponseWriter, _ *http.Request) {
		environ := make(map[string]string)
		for _, variable := range os.Environ() {
			key, value, _ := strings.Cut(variable, "=")
			environ[key] = value
		}
		_ = json.NewEncoder(w).Encode(seen{os.Getpid(), environ})
	})
	go func() { _ = http.Serve(listener, mux) }()
	fmt.Fprintf(os.Stderr, `{"level":"INFO","msg":"%s started"}`+"\n", name)
	fmt.Fprintf(os.Stderr, `{"level":"WARN","msg":"%s warns","why":"test"}`+"\n", name)

	<-ctx.Done()
	note := name + " stopped"
	conn, err := pgx.Connect(context.Background(), os.Getenv("DATABASE_URL"))
	if err != nil {
		note += " without a database"
	} else {
		_ = conn.Close(context.Background())
	}
	if brokers := os.Getenv("KAFKA_BROKERS"); brokers != "" {
		if _, err := net.Dial("tcp", brokers); err != nil {
			note += " without a broker"
		}
	}
	file, err := os.OpenFile(os.Getenv("TEST_NOTES"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(file, note)
	return err
}

// runBroker is `onceledger broker`.
func runBroker(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	config := devstack.BrokerConfig{
		Ready: func(addr string) { fmt.Println("ready", addr) },
		Logf:  func(format string, args ...any) { fmt.Fprintf(os.Stderr, format+"\n", args...) },
	}
	for i := 0; i+1 < len(args); i += 2 {
		var err error
		switch args[i] {
		case "--dir":
			config.Dir = args[i+1]
		case "--port":
			_, err = fmt.Sscan(args[i+1], &config.Port)
		default:
			err = fmt.Errorf("unknown flag %s", args[i])
		}
		if err != nil {
			return err
		}
	}
	return devstack.RunBroker(ctx, config)
}
