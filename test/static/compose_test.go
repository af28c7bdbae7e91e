package static_test

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/compose-spec/compose-go/v2/cli"
	"github.com/compose-spec/compose-go/v2/types"
	"github.com/stretchr/testify/require"
)

// load reads docker-compose.yml the way Docker Compose does: what can be checked
// of it without a Docker engine.
func load(t *testing.T, environ ...string) *types.Project {
	t.Helper()
	options, err := cli.NewProjectOptions([]string{filepath.Join(root, "docker-compose.yml")}, cli.WithEnv(environ))
	require.NoError(t, err)
	project, err := options.LoadProject(t.Context())
	require.NoError(t, err)
	return project
}

func TestComposeServices(t *testing.T) {
	t.Parallel()

	project := load(t)
	oneShots := map[string]bool{}
	for _, service := range project.Services {
		for name, dependency := range service.DependsOn {
			if dependency.Condition == types.ServiceConditionCompletedSuccessfully {
				oneShots[name] = true
			}
		}
	}
	require.ElementsMatch(t,
		[]string{"postgres", "kafka", "migrate", "passwords", "topics", "key", "worker", "api"}, project.ServiceNames())

	for name, service := range project.Services {
		t.Run(name, func(t *testing.T) {
			t.Parallel()

			require.Regexp(t, pinned, service.Image)
			if service.Build != nil {
				require.FileExists(t, filepath.Join(service.Build.Context, "Dockerfile"))
			}
			require.Regexp(t, `^[1-9][0-9]*:[1-9][0-9]*$`, service.User, "it must not run as root")
			if oneShots[name] {
				require.Nil(t, service.HealthCheck)
				require.Contains(t, service.Restart, "on-failure")
			} else {
				require.NotNil(t, service.HealthCheck, "neither a health check nor one that ends by itself")
				require.NotEmpty(t, service.HealthCheck.Test)
			}
			for _, mount := range service.Volumes {
				if mount.Type == types.VolumeTypeBind {
					require.FileExists(t, mount.Source)
				}
			}
			for _, port := range service.Ports {
				require.Equal(t, "127.0.0.1", port.HostIP, "a developer's stack is not for the network")
			}
		})
	}
}

// pinned is an image with a version that is one, and not "latest" or none.
var pinned = regexp.MustCompile(`^[a-z/]+:(\d+(\.\d+)*(-[a-z]+)?|[a-z]+-slim|dev)$`)

func TestDockerfileImagesArePinned(t *testing.T) {
	t.Parallel()

	text, err := os.ReadFile(filepath.Join(root, "Dockerfile"))
	require.NoError(t, err)
	stages := regexp.MustCompile(`(?m)^FROM (\S+)`).FindAllStringSubmatch(string(text), -1)
	require.Len(t, stages, 2)
	for _, stage := range stages {
		require.Regexp(t, pinned, stage[1])
	}
	users := regexp.MustCompile(`(?m)^USER (\S+)$`).FindAllStringSubmatch(string(text), -1)
	require.Len(t, users, 1)
	require.Equal(t, load(t).Services["api"].User, users[0][1])
}

// TestComposeTellsProgramsWhatTheyAsk compares what the services are told with what the programs ask.
func TestComposeTellsProgramsWhatTheyAsk(t *testing.T) {
	t.Parallel()

	asked := variables(t, "internal/config")
	require.Contains(t, asked, "DATABASE_URL")
	for _, name := range []string{"api", "worker"} {
		service := load(t).Services[name]
		require.Equal(t, types.ShellCommand{name}, service.Command)
		require.DirExists(t, filepath.Join(root, "cmd", name))
		for variable := range service.Environment {
			require.Contains(t, asked, variable, "%s is given a variable that no program reads", name)
		}
	}
}

// TestComposeOrder: publication (migrate) before the slot (worker) before the first
// order (api), and the topics before the relay.
func TestComposeOrder(t *testing.T) {
	t.Parallel()

	project := load(t)
	before := func(first, then string) {
		t.Helper()
		var reach func(name string) bool
		reach = func(name string) bool {
			dependencies := project.Services[name].GetDependencies()
			return slices.Contains(dependencies, first) || slices.ContainsFunc(dependencies, reach)
		}
		require.True(t, reach(then), "%s must come before %s", first, then)
	}
	before("postgres", "migrate")
	before("migrate", "passwords")
	before("passwords", "worker")
	before("topics", "worker")
	before("worker", "api")
	before("key", "api")
	require.Equal(t, types.ServiceConditionHealthy, project.Services["api"].DependsOn["worker"].Condition)
}

func TestComposePostgresServesTheRelay(t *testing.T) {
	t.Parallel()

	command := strings.Join(load(t).Services["postgres"].Command, " ")
	require.Contains(t, command, "wal_level=logical")
	require.Contains(t, command, "max_slot_wal_keep_size=4GB")
	require.Contains(t, command, "wal_sender_timeout=5s")
}

func TestComposeKafkaMakesNoTopicByItself(t *testing.T) {
	t.Parallel()

	environment := load(t).Services["kafka"].Environment
	require.Equal(t, "false", *environment["KAFKA_AUTO_CREATE_TOPICS_ENABLE"])
	script := strings.Join(load(t).Services["topics"].Command, " ")
	for _, topic := range []string{"order.events", "billing.events"} {
		require.Contains(t, script, topic)
	}
}

// TestComposePasswords: one variable changes a password at both ends.
func TestComposePasswords(t *testing.T) {
	t.Parallel()

	environ := []string{
		"ONCELEDGER_ADMIN_PASSWORD=s-admin", "ONCELEDGER_API_PASSWORD=s-api", "ONCELEDGER_RELAY_PASSWORD=s-relay",
		"ONCELEDGER_WORKER_PASSWORD=s-worker", "ONCELEDGER_JANITOR_PASSWORD=s-janitor", "ONCELEDGER_VERIFY_PASSWORD=s-verify",
	}
	project := load(t, environ...)
	given := project.Services["passwords"].Environment
	sql, err := os.ReadFile(filepath.Join(root, "deploy", "compose", "passwords.sql"))
	require.NoError(t, err)
	for service, variable := range map[string]string{"api DATABASE_URL": "api", "worker DATABASE_URL": "worker",
		"worker RELAY_DATABASE_URL": "relay", "worker JANITOR_DATABASE_URL": "janitor"} {
		name, url, _ := strings.Cut(service, " ")
		require.Contains(t, *project.Services[name].Environment[url], "onceledger_"+variable+":s-"+variable+"@postgres:5432/onceledger")
	}
	for _, role := range []string{"api", "relay", "worker", "janitor", "verify"} {
		require.Equal(t, "s-"+role, *given[strings.ToUpper(role)+"_PASSWORD"])
		require.Contains(t, string(sql), "ALTER ROLE onceledger_"+role+" PASSWORD")
	}
	require.Equal(t, "s-admin", *project.Services["postgres"].Environment["POSTGRES_PASSWORD"])
	require.Contains(t, *project.Services["migrate"].Environment["DATABASE_URL"], "postgres:s-admin@")
	require.Contains(t, *project.Services["key"].Environment["DATABASE_URL"], "postgres:s-admin@")
}
